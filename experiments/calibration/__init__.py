"""Do measured rates predict the time of a step better than assumed ones?"""
